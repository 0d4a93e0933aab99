"""What the attention layers of a model ask and cache, by arm, layer and quantity."""
