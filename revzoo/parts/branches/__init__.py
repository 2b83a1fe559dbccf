"""Branches: f and g of a reversible step, without residual, which the coupling adds."""

from revzoo.parts.branches import attention, convolution, decoder, mlp, reformer, window_attention

__all__ = ["attention", "convolution", "decoder", "mlp", "reformer", "window_attention"]
