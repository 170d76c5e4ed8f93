"""What attackers of the toolkit have tried, as data, and what tries it again."""
