package engine

// A pool is the KV cache: blocks of tokens, counted references, and an index of the blocks whose contents have a name.
// It belongs to one Core.
type pool struct {
	blocks []block          // blocks[0] is the head of the ring of free blocks, not a block
	free   int              // length of that ring: blocks nobody holds
	index  map[uint64]int32 // hash to the block that has it, held or free
}

type block struct {
	hash       uint64 // names the tokens up to and including this block's; valid if hashed
	refs       int32  // sequences that hold it
	prev, next int32  // in the ring while refs is 0
	hashed     bool
}

func newPool(n int) pool {
	p := pool{blocks: make([]block, n+1), index: make(map[uint64]int32)}
	for b := int32(1); b <= int32(n); b++ {
		p.link(b, p.blocks[0].prev)
	}
	return p
}

func (p *pool) total() int { return len(p.blocks) - 1 }

func (p *pool) used() int { return p.total() - p.free }

// take returns a block that is not held, the one unused for longest, and forgets its contents. There must be one.
func (p *pool) take() int32 {
	b := p.blocks[0].next
	p.unlink(b)
	x := &p.blocks[b]
	if x.hashed {
		delete(p.index, x.hash)
		x.hashed = false
	}
	x.refs = 1
	return b
}

// share adds a holder to a block, which may be free.
func (p *pool) share(b int32) {
	if p.blocks[b].refs == 0 {
		p.unlink(b)
	}
	p.blocks[b].refs++
}

// drop removes a holder. Contents that somebody may ask for go to the end of the ring, others to its start.
func (p *pool) drop(b int32) {
	x := &p.blocks[b]
	if x.refs--; x.refs > 0 {
		return
	}
	if x.hashed {
		p.link(b, p.blocks[0].prev)
	} else {
		p.link(b, 0)
	}
}

// name makes a block's contents findable, unless another block has the same.
func (p *pool) name(b int32, hash uint64) {
	if _, ok := p.index[hash]; ok || p.blocks[b].hashed {
		return
	}
	p.blocks[b].hash, p.blocks[b].hashed = hash, true
	p.index[hash] = b
}

// link puts a block into the ring of free blocks behind prev.
func (p *pool) link(b, prev int32) {
	next := p.blocks[prev].next
	p.blocks[b].prev, p.blocks[b].next = prev, next
	p.blocks[prev].next, p.blocks[next].prev = b, b
	p.free++
}

func (p *pool) unlink(b int32) {
	prev, next := p.blocks[b].prev, p.blocks[b].next
	p.blocks[prev].next, p.blocks[next].prev = next, prev
	p.free--
}
