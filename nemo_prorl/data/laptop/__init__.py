"""Small problems for a laptop run, and the small base model that learns them."""
