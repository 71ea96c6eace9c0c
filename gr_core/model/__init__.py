"""The generative recommender: embeddings, attention, blocks, heads, losses."""
