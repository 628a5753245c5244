"""Commands that time the library, compared with bf16 and torchao."""
