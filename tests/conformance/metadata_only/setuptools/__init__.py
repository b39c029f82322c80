"""Stands in for setuptools while pip asks a source distribution for its name and version."""
