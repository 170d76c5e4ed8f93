"""The built-in HTTP server of `compress serve`."""
