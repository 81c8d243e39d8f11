package extproc

import "sync/atomic"

// tail is the last four bytes of a body, the latest in the lowest byte, with a bit
// above them once there are any.
type tail uint64

const (
	someBytes tail = 1 << 32
	unclear   tail = someBytes | 'x' // ends inside an event, for all that is known
)

func (t tail) after(p []byte) tail {
	for _, c := range p[max(0, len(p)-4):] {
		t = (t<<8|tail(c))&0xffffffff | someBytes
	}
	return t
}

// endsEvent reports whether an event may follow: nothing was sent, or an empty line
// was, in one of the spellings that the parsers of SSE clients split at.
func (t tail) endsEvent() bool {
	const lflf, crcr, crlfcrlf = '\n'<<8 | '\n', '\r'<<8 | '\r', '\r'<<24 | '\n'<<16 | '\r'<<8 | '\n'
	return t == 0 || t&0xffff == lflf || t&0xffff == crcr || t&0xffffffff == crlfcrlf
}

// A chunk is the end of a part of the body.
type chunk struct {
	last [4]byte
	n    int8 // how many of last are there; -1: nobody knows
}

func (t tail) afterChunk(c chunk) tail {
	if c.n < 0 {
		return unclear
	}
	return t.after(c.last[:c.n])
}

// owed is the chunks whose replies the server owes in STREAMED, which come in the order
// of the chunks. One side of the stream pushes while the other pops; a chunk beyond
// the newest few is counted and not remembered.
type owed struct {
	in, out atomic.Uint32 // how many were pushed and popped
	slots   [8]struct {
		number uint32
		chunk  chunk
	}
}

func (o *owed) push(p []byte) {
	n := o.in.Load()
	if n-o.out.Load() < uint32(len(o.slots)) { // else the slot is in use
		s := &o.slots[n%uint32(len(o.slots))]
		s.number, s.chunk.n = n, int8(copy(s.chunk.last[:], p[max(0, len(p)-4):]))
	}
	o.in.Store(n + 1)
}

func (o *owed) pop() chunk {
	n := o.out.Load()
	if n == o.in.Load() {
		return chunk{n: -1} // a reply to nothing
	}
	c := chunk{n: -1}
	if s := &o.slots[n%uint32(len(o.slots))]; s.number == n {
		c = s.chunk
	}
	o.out.Store(n + 1)
	return c
}

func (o *owed) empty() bool { return o.in.Load() == o.out.Load() }
