"""`bateleur bench`: speeds beside those of other engines, in turn, and beside what memory allows."""

VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
"""What processes of vLLM are started with; 2 GiB of keys and values are as much as these measurements need."""
