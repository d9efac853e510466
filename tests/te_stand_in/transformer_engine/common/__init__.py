"""Parts that all frameworks share."""

from transformer_engine.common import recipe as recipe
