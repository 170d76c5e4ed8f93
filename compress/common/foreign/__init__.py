"""Guards for what others wrote: files, native libraries and their locks."""
