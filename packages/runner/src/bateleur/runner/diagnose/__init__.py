"""What a checkpoint costs, what runs on which graph, why drafts are rejected."""
