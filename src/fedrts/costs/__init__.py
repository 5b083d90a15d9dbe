"""What a round costs a client, in three accountings: the paper's tables, the paper's rules, and measured."""
