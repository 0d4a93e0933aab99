"""Models at work on batches of trials: cells, serving, held-out queries, index fits."""
