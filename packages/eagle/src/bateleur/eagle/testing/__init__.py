"""What proves a drafter, a rule or an engine right, for anybody's: toys whose laws are known, and drafters that are."""
