package extproc

import (
	"sync"
	"sync/atomic"
)

// A turn is a lock for what goroutines do with a stream one at a time: receive, or
// send. Unlike a Mutex it is held across calls into grpc, and whoever waits for it is
// idle for a synctest bubble, else fake clocks would stop behind a proxy that does not
// read. Taking one that is free costs one atomic operation, and giving it back
// another.
type turn struct {
	state atomic.Int32 // free, taken, or contended: taken, and somebody may wait
}

const (
	free int32 = iota
	taken
	contended
)

// A bench is where a stream's goroutines wait for their turns.
type bench struct {
	mu   sync.Mutex
	cond sync.Cond // its L is &mu
}

// take takes the turn. If it is not free, take waits until it is, and reports false if
// giveUp is true before that. giveUp is called with the bench's lock held, first and
// after each wake.
func (b *bench) take(t *turn, giveUp func() bool) bool {
	return t.state.CompareAndSwap(free, taken) || b.wait(t, giveUp)
}

func (b *bench) wait(t *turn, giveUp func() bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for !giveUp() {
		if t.state.Swap(contended) == free {
			return true
		}
		b.cond.Wait()
	}
	return false
}

// give gives the turn back.
func (b *bench) give(t *turn) {
	if t.state.Swap(free) == contended {
		b.wake()
	}
}

// wake has everybody who waits look again.
func (b *bench) wake() {
	b.mu.Lock() // whoever has found its turn taken waits by now
	defer b.mu.Unlock()
	b.cond.Broadcast()
}
