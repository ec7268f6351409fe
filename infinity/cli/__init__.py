"""The command line: infinity finetune."""
