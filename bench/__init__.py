"""What is measured and foreseen on the virtual device, official beside ours."""
