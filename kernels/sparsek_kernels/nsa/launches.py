"""Launches of the Triton kernels; ``torch_path`` has functions of the same names in torch."""
# ruff: noqa: F401 - operators look each name up in this module or in ``torch_path``

from sparsek_kernels.nsa.compress.launch import mean_pool_backward, mean_pool_forward
from sparsek_kernels.nsa.compressed.launch import backward as compressed_backward
from sparsek_kernels.nsa.compressed.launch import forward as compressed_forward
from sparsek_kernels.nsa.gate.launch import backward as gated_backward
from sparsek_kernels.nsa.gate.launch import forward as gated_forward
from sparsek_kernels.nsa.select.launch import select as select_forward
from sparsek_kernels.nsa.select.launch_fused import attend_and_select
from sparsek_kernels.nsa.selected.launch_bwd import backward as selected_backward
from sparsek_kernels.nsa.selected.launch_fwd import forward as selected_forward
from sparsek_kernels.nsa.selected.launch_fwd import forward_gated as selected_gated
