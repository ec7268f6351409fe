"""`infinity plan`: a prediction of whether a model fits, where its states are placed and how fast it trains.

The command moves no weights or states.
"""
