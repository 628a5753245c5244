"""Commands that time the library beside bf16 and torchao."""
