"""Read at the start of every Python process whose PYTHONPATH names this folder.

PyPI's torchvision is built for CUDA: beside a CPU build of torch its library does not load, and its import fails with
"operator torchvision::nms does not exist". Declared here, so that its Python part can be imported; none is ever called.
"""

from __future__ import annotations

import torch

BOX = "float spatial_scale, int pooled_height, int pooled_width"
SHAPE = "int batch_size, int channels, int height, int width"
CONVOLUTION = (
    "int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, int groups, "
    "int offset_groups, bool use_mask"
)
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {BOX}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {BOX}, {SHAPE}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {BOX}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {BOX}, {SHAPE}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {BOX}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor mapping, {BOX}, int ratio, {SHAPE}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {BOX}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor mapping, {BOX}, {SHAPE}) -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {CONVOLUTION}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{CONVOLUTION}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)

library = torch.library.Library("torchvision", "DEF")
for operator in OPERATORS:
    library.define(operator)
