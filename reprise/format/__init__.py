"""The format on disk: names, layout, manifest and headers."""
