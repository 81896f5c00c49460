"""The series of patches, and what ships: wheel, overlay, image, bundle."""
