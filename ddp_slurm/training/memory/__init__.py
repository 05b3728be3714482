"""What a card's memory holds: the largest micro-batch, and what to do when memory runs out."""
