"""Communication between tensor parallel ranks and pipeline stages; knows no model and no layer."""
