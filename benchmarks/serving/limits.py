"""What two runs of the same model may differ by."""

MEAN = 0.01  # nats, of a log-probability on average: the same arithmetic, summed in another order
TIE = 2.0**-5  # nats: what both may take for equally good; five times the mean difference of two implementations
