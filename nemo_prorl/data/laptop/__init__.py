"""The laptop's toy problems, and the small model that learns them."""
