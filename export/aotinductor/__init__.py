"""The AOTInductor exporter: native code in a `.pt2` package."""
