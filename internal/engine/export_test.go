package engine

import "fmt"

// Check verifies what must hold inside a Core between its calls.
func (c *Core) Check() error {
	p := &c.pool
	refs := make([]int32, len(p.blocks))
	for _, l := range [][]*Sequence{c.running, c.leaked} {
		for _, s := range l {
			for _, b := range s.blocks {
				refs[b]++
			}
		}
	}
	for b := 1; b < len(refs); b++ {
		switch x := p.blocks[b]; {
		case x.refs != refs[b]:
			return fmt.Errorf("block %d has %d references, is held by %d", b, x.refs, refs[b])
		case x.hashed && p.index[x.hash] != int32(b):
			return fmt.Errorf("block %d is not found by its hash", b)
		}
	}
	for h, b := range p.index {
		if x := p.blocks[b]; !x.hashed || x.hash != h {
			return fmt.Errorf("hash %d finds block %d, which is another", h, b)
		}
	}
	n := 0
	for b := p.blocks[0].next; b != 0; b = p.blocks[b].next {
		if n++; refs[b] != 0 || n > p.free {
			return fmt.Errorf("block %d, number %d of %d in the ring, is held by %d", b, n, p.free, refs[b])
		}
	}
	if n != p.free {
		return fmt.Errorf("%d blocks in the ring, %d are free", n, p.free)
	}
	planned := 0
	for i, s := range c.running {
		planned += s.planned
		switch {
		case s.State != Running:
			return fmt.Errorf("state %d in the batch", s.State)
		case len(s.blocks) != c.blocksFor(s.Computed+s.planned):
			return fmt.Errorf("%d blocks for %d+%d tokens", len(s.blocks), s.Computed, s.planned)
		case i < len(c.running)-1 && s.planned != s.missing() && c.busy:
			return fmt.Errorf("number %d of %d lags: %d of %d", i, len(c.running), s.planned, s.missing())
		}
	}
	for _, s := range c.waiting {
		if s.State != Waiting || len(s.blocks) != 0 || s.planned != 0 || s.Computed != 0 {
			return fmt.Errorf("state %d in the queue, with %d blocks", s.State, len(s.blocks))
		}
	}
	if c.busy != (planned > 0) || planned > c.cfg.MaxBatchedTokens || planned != c.step.Prefill+c.step.Decodes {
		return fmt.Errorf("%d tokens in flight, reported %d+%d, busy %t", planned, c.step.Prefill, c.step.Decodes, c.busy)
	}
	if len(c.running)+len(c.leaked) > c.cfg.MaxSeqs {
		return fmt.Errorf("%d in the batch", len(c.running))
	}
	return nil
}
