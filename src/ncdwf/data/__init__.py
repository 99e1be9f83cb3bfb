"""Pictures come in: reading, checking, splitting and augmenting them."""
