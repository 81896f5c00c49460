"""Maintain the series, and build what ships: wheel, overlay, image, bundle."""
