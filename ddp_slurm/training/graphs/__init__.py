"""Forward and backward as a CUDA graph, where that is possible and faster."""
