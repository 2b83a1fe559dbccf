"""BatchNorm and leaky ReLU as one layer that keeps its output alone: in-place activated BatchNorm (ABN).

A BatchNorm keeps its input x for backward, and the convolution after the activation keeps the activation's output y: two
tensors of one size. As leaky ReLU can be undone, y is enough. From it, backward rebuilds what BatchNorm needs:

    y = act(z),  z = weight * xhat + bias    =>    z = act^-1(y),  xhat = (z - bias) / weight

So x is freed as soon as nobody else holds it; a convolution does not keep its output. "In place" is meant in this sense:
no tensor is overwritten that somebody else could read.

The function is that of BatchNorm and activation, also where a weight is negative or 0. Where a weight is so small that xhat
would drown in the rounding of z, the normalised input of that channel is kept (`function.py`).
To read that would make a GPU wait in every layer, so there an earlier step shows which channels these are (`weak.py`).

Backward takes one new tensor of the size of x, and three temporaries of the size of some channels (`backward.py`). Channels are
independent, so all of a part is computed while it is in the cache.

Source: Rota Bulo et al. 2018, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", section 3. Differs from it:
there the scale is |weight| + eps, which changes the function of trained weights.
"""
