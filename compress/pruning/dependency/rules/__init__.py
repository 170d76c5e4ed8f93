"""How channel labels pass through each kind of operator."""
