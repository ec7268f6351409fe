"""`infinity plan`: whether, where and how fast a model will train, before a byte moves."""
