"""Why an exported file is too slow, too large or wrong: profiles by module, and causes."""
