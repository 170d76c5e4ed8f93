"""Does an exported file answer like its source?"""
