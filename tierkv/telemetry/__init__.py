"""What an agent says of itself: histograms, counters, events and one frozen snapshot."""
