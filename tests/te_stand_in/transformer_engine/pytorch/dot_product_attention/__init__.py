"""Parts of attention."""
