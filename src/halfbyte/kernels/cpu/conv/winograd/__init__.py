"""3 x 3 convolutions with stride 1 by Winograd's minimal filtering F(4x4, 3x3): exact sums of int8 codes with a quarter of the products.

    y = A^T [ sum over ci of (G g G^T) * (B^T d B) ] A / 576        d 6 x 6 pixels, g 3 x 3 weights, y 4 x 4 outputs, * elementwise

transforms.py      the matrices A, B, G in integers, and the transformed weights
tiling.py          how the outputs of images are cut into tiles; what the code is compiled for
winograd.py        the code: transforms the tiles of the images, multiplies, transforms the sums into outputs
winograd_call.py   plans calls: `WinogradKernel`, `WinogradScalingKernel`; when they are faster than other kernels

S. Winograd, "Arithmetic complexity of computations", 1980; A. Lavin and S. Gray, "Fast algorithms for convolutional neural networks", 2016.
"""
