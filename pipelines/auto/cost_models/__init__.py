"""What a candidate of `compress auto` would take, in time and in bytes, before it is built."""
