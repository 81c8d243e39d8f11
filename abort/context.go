package abort

import (
	"context"
	"sync/atomic"
	"time"
)

// requestContext is a request's context. The cancelable context that it stands for
// is made when somebody first needs it: a child of grpc's context costs five
// allocations, and most ext_proc servers never watch theirs.
type requestContext struct {
	parent context.Context
	h      *Handle
	child  atomic.Pointer[cancelContext]
	ended  atomic.Bool
}

type cancelContext struct {
	context.Context
	cancel context.CancelCauseFunc
}

// cancelable returns the context's child, which it makes if need be.
func (c *requestContext) cancelable() *cancelContext {
	child := c.child.Load()
	if child == nil {
		n := new(cancelContext)
		n.Context, n.cancel = context.WithCancelCause(c.parent)
		if !c.child.CompareAndSwap(nil, n) {
			n.cancel(nil)
		}
		child = c.child.Load()
	}
	if c.ended.Load() { // end may have come too early to see the child
		child.cancel(nil)
	}
	return child
}

// end ends the context, without a cause of its own.
func (c *requestContext) end() {
	c.ended.Store(true)
	if child := c.child.Load(); child != nil {
		child.cancel(nil)
	}
}

func (c *requestContext) Deadline() (time.Time, bool) { return c.parent.Deadline() }

func (c *requestContext) Done() <-chan struct{} { return c.cancelable().Done() }

// Err asks a child once anything has ended: only a child's error is for good, whatever
// becomes of parent.
func (c *requestContext) Err() error {
	left := c.parent.Err() != nil
	if !left && !c.ended.Load() && c.child.Load() == nil {
		return nil
	}
	child := c.cancelable()
	if left {
		// Whoever ends parent is about to end the child. A server that has just been told
		// by grpc that its client left must not find a context that is still alive.
		<-child.Done()
	}
	return child.Err()
}

// Value finds the child's own keys too: that is how package context gets at the
// cause, and how it ties further children to it without a goroutine.
func (c *requestContext) Value(key any) any {
	if key == (handleKey{}) {
		return c.h
	}
	if child := c.child.Load(); child != nil {
		return child.Value(key)
	}
	return c.parent.Value(key)
}

func (c *requestContext) String() string { return "abort.Context" }
