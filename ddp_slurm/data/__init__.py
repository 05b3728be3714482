"""One data set for all nodes: prepared and served on one machine, fetched once by each node."""
