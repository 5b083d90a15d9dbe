"""The combinatorial semi-bandit of the paper's theory: independent arms with known means, policies, regret and its bound."""
