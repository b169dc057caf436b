"""A BMC that speaks Redfish: one state, shown in both schemas, as vendors write it, and as badly as it gets."""
