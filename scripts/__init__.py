"""Commands that back the documents' claims; run as modules from the root of the checkout."""
