"""What the ranks send each other, and how: exact in one or two levels, in bf16, PowerSGD, local
steps."""
