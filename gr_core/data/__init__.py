"""Events to packs: contract, due, sequences, vocabulary, packing; and packs to tensors."""
