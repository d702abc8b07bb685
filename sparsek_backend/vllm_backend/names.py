"""Names in vLLM's registries, and the import paths behind them.  Imports nothing."""

BACKEND_NAME = "SPARSEK"
BACKEND_PATH = "sparsek_backend.vllm_backend.sparsek.backend.SparseKBackend"
NSA_ARCHITECTURE = "NSALlamaForCausalLM"
NSA_MODEL_PATH = "sparsek_backend.vllm_backend.nsa.model:NSALlamaForCausalLM"
