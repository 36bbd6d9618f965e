"""What the responses to held-out problems come to: estimates, their intervals, and the record of an evaluation."""
