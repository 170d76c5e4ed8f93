"""Types that every station of the road shares; imports no torch until a model is touched."""
