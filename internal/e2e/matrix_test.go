package e2e_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/internal/envoy"
)

// matrix is what an eviction does in each phase of a request, in each mode, on every
// path:
//
//   - what the client gets: the 429 with its headers and error object, or so many
//     events, perhaps an error event, and a reset; or the whole response
//   - whether the backend was called, and how it ended
//   - status and details in the access log
//   - outcome, phase, answer and effect as the observer is told
//   - how many victims Evict returned
//   - what the ext_proc server's next Recv returned: the abort, EOF or Canceled
//
// In NONE the end of a response shows only in trailers, so these responses have some.
const matrix = `
	phase                  mode                  client                backend    log                    outcome    phase      answer   effect  victims  recv
	request-headers-held   NONE                  429                   uncalled   429_evicted_preempted  aborted    waiting    status   ended   1        abort
	request-headers-held   STREAMED              429                   uncalled   429_evicted_preempted  aborted    waiting    status   ended   1        abort
	request-headers-held   BUFFERED              429                   uncalled   429_evicted_preempted  aborted    waiting    status   ended   1        abort
	request-headers-held   FULL_DUPLEX_STREAMED  429                   uncalled   429_evicted_preempted  aborted    waiting    status   ended   1        abort
	upload                 NONE                  429,closes            cancelled  429_evicted_preempted  aborted    unknown    unknown  ended   1        abort
	upload                 STREAMED              429,closes            cancelled  429_evicted_preempted  aborted    waiting    status   ended   1        abort
	upload                 BUFFERED              429,closes            uncalled   429_evicted_preempted  aborted    waiting    status   ended   1        abort
	upload                 FULL_DUPLEX_STREAMED  429,closes            cancelled  429_evicted_preempted  aborted    waiting    status   ended   1        abort
	waiting                NONE                  429                   cancelled  429_evicted_preempted  aborted    unknown    unknown  ended   1        abort
	waiting                STREAMED              429                   cancelled  429_evicted_preempted  aborted    waiting    status   ended   1        abort
	waiting                BUFFERED              429                   cancelled  429_evicted_preempted  aborted    waiting    status   ended   1        abort
	waiting                FULL_DUPLEX_STREAMED  429                   cancelled  429_evicted_preempted  aborted    waiting    status   ended   1        abort
	response-headers-held  NONE                  429                   cancelled  429_evicted_preempted  aborted    held       status   ended   1        abort
	response-headers-held  STREAMED              429                   cancelled  429_evicted_preempted  aborted    held       status   ended   1        abort
	response-headers-held  BUFFERED              429                   cancelled  429_evicted_preempted  aborted    held       status   ended   1        abort
	response-headers-held  FULL_DUPLEX_STREAMED  429                   cancelled  429_evicted_preempted  aborted    held       status   ended   1        abort
	mid-body               NONE                  3-events,reset        cancelled  200_evicted_preempted  aborted    streaming  reset    ended   1        abort
	mid-body               STREAMED              3-events,reset        cancelled  200_evicted_preempted  aborted    streaming  reset    ended   1        abort
	mid-body               BUFFERED              429                   cancelled  429_evicted_preempted  aborted    held       status   ended   1        abort
	mid-body               FULL_DUPLEX_STREAMED  3-events,error,reset  cancelled  200_evicted_preempted  aborted    streaming  event    ended   1        abort
	end-held               NONE                  whole                 finished   200_via_upstream       completed  streaming  none     none    0        canceled
	end-held               STREAMED              whole                 finished   200_via_upstream       completed  streaming  none     none    0        canceled
	end-held               BUFFERED              whole                 finished   200_via_upstream       completed  held       none     none    0        canceled
	end-held               FULL_DUPLEX_STREAMED  whole                 finished   200_via_upstream       completed  streaming  none     none    0        canceled
	after-the-end          NONE                  whole                 finished   200_via_upstream       completed  streaming  none     none    0        canceled
	after-the-end          STREAMED              whole                 finished   200_via_upstream       completed  streaming  none     none    0        canceled
	after-the-end          BUFFERED              whole                 finished   200_via_upstream       completed  held       none     none    0        canceled
	after-the-end          FULL_DUPLEX_STREAMED  whole                 finished   200_via_upstream       completed  streaming  none     none    0        canceled
`

// A phase is where an eviction finds a request.
type phase struct {
	name    string
	hold    mark // the message whose reply the ext_proc server holds
	busy    mark // the message after whose reply it does not look
	backend backend
	reached func(mode) []mark
}

func when(all ...mark) func(mode) []mark { return func(mode) []mark { return all } }

var phases = []phase{
	{"request-headers-held", requestHeaders, "", comesLate, when(holding)},
	{"upload", "", "", comesLate, func(m mode) []mark {
		if m.buffers() { // nothing of it goes on
			return []mark{replied(requestHeaders)}
		}
		return []mark{uploaded}
	}},
	{"waiting", "", "", comesLate, when(wrote)},
	{"response-headers-held", responseHeaders, "", resumes, when(holding)},
	{"mid-body", "", "", resumes, func(m mode) []mark {
		if m.buffers() {
			return []mark{wrote, replied(responseHeaders)}
		}
		return []mark{hasEnough}
	}},
	{"end-held", responseEnd, "", finishes, when(holding)},
	{"after-the-end", "", "", finishes, when(done)},
}

func TestMatrix(t *testing.T) {
	for _, m := range modes {
		t.Run(m.String(), func(t *testing.T) { testMatrix(t, setup{mode: m}) })
	}
}

// testMatrix holds every path of a world against the matrix.
func testMatrix(t *testing.T, s setup) {
	w := start(t, s)
	for _, p := range w.paths {
		t.Run(p.name, func(t *testing.T) {
			var want []string
			for _, r := range table(matrix, p.envoy) {
				if p.name != "h1" {
					r = strings.ReplaceAll(r, ",closes", "") // tells HTTP/1.1 that its connection ends
				}
				if strings.Fields(r)[1] == s.mode.String() {
					want = append(want, r)
				}
			}
			got := make([]string, len(phases))
			var mu sync.Mutex  // guards took
			var took []float64 // ms, of those that were cancelled
			var wg sync.WaitGroup
			for i, ph := range phases {
				wg.Go(func() {
					c, victims, err := w.evictIn(p, ph)
					if err != nil {
						got[i] = row(ph.name, s.mode, err)
						return
					}
					e := c.event
					got[i] = row(ph.name, s.mode, c.client(), c.upstream(), fmt.Sprintf("%d_%s", c.logged.Code, c.logged.Details),
						e.Outcome, e.Phase, e.Answer, e.Effect, victims, ending(c.ended))
					if c.served != nil {
						mu.Lock()
						defer mu.Unlock()
						took = append(took, float64(c.servedAt.Sub(c.evictedAt))/float64(time.Millisecond))
					}
				})
			}
			wg.Wait()
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
			// The fastest, since the others may meet a stall of the machine.
			if len(took) == 0 || slices.Min(took) > 100 {
				t.Errorf("it takes %.1f ms until a backend is cancelled, want 100", took)
			}
		})
	}
}

// evictIn evicts one call in one phase and returns it when all is over.
func (w *world) evictIn(p *path, ph phase) (c *call, victims int, err error) {
	c = newCall(p, ph.backend)
	c.hold, c.busy, c.enough, c.trailer = ph.hold, ph.busy, len(events(3)), w.mode.ResponseTrailers == envoy.Send
	r, upload := io.Pipe()
	defer upload.Close()
	if ph.name == "upload" {
		c.body = r
		go io.WriteString(upload, `{"model":`) // there is more to come
	}
	w.start(w.Context(), c)
	if err := c.await(ph.reached(w.mode)...); err != nil {
		return c, 0, err
	}
	if !w.mode.keeps() {
		select { // as long as an end of the ext_proc stream may be on its way
		case <-c.at(observed):
		case <-time.After(300 * time.Millisecond):
		}
	}
	vs, err := w.evict(c)
	if err != nil || len(vs) > 0 && vs[0] != c.handle {
		return c, 0, fmt.Errorf("evicted %v, %v", vs, err)
	}
	if len(vs) > 0 {
		// The ext_proc server is not needed for any of this, and may be held or busy.
		if err := errors.Join(c.await(done), await(c.handle.Done(), "Handle.Done")); err != nil {
			return c, 0, err
		}
		if c.isSet(called) {
			if err := c.await(backendDone); err != nil {
				return c, 0, err
			}
		}
	}
	upload.Close()
	close(c.resume)
	close(c.look)
	if err := errors.Join(c.await(done, hungUp, observed), await(c.handle.Done(), "Handle.Done")); err != nil {
		return c, 0, err
	}
	if c.isSet(called) {
		if err := c.await(backendDone); err != nil {
			return c, 0, err
		}
	}
	if c.handle.Outcome() != c.event.Outcome || c.event.Err != nil {
		return c, 0, fmt.Errorf("the handle says %v, the event %+v", c.handle.Outcome(), c.event)
	}
	c.logged, err = w.line(c)
	return c, len(vs), err
}

// upstream says in a word how the backend ended.
func (c *call) upstream() string {
	switch {
	case !c.isSet(called):
		return "uncalled"
	case c.served != nil:
		return "cancelled"
	}
	return "finished"
}

const (
	errorObject = `{"error":{"message":"The request was evicted: preempted. Please retry.","type":"rate_limit_error","param":null,"code":"request_evicted"}}`
	errorEvent  = "data: " + errorObject + "\n\n"
)

// client says in a word what the client got, if that has a word.
func (c *call) client() string {
	r := c.reply
	end := "complete"
	if r.err != nil {
		if end = fmt.Sprint(r.err); c.path.reset(r.err) {
			end = "reset"
		}
	}
	closes := ""
	if r.close {
		closes = ",closes"
	}
	switch {
	case r.status == http.StatusTooManyRequests && r.err == nil && r.body == errorObject && r.length == int64(len(r.body)) &&
		r.header.Get("Content-Type") == "application/json" && r.header.Get("Retry-After") == "1" && r.header.Get("X-Evicted-Reason") == "preempted":
		return "429" + closes
	case r.status == http.StatusOK && r.header.Get("Content-Type") == "text/event-stream" && r.length < 0:
		body, isError := strings.CutSuffix(r.body, errorEvent)
		n := strings.Count(body, "\n\n")
		switch {
		case r.body == events(3)+last && r.err == nil && (r.trailer.Get("X-End") == "yes") == c.trailer:
			return "whole" + closes
		case r.body == events(3)+last && r.err != nil:
			return "all," + end + closes
		case body == events(n) && isError:
			return fmt.Sprintf("%d-events,error,%s%s", n, end, closes)
		case body == events(n):
			return fmt.Sprintf("%d-events,%s%s", n, end, closes)
		}
	}
	return fmt.Sprintf("%d_%v_%v_%q_%s%s", r.status, r.header, r.trailer, r.body, end, closes)
}

// ending says in a word what an ext_proc server's Recv or Send failed with.
func ending(err error) string {
	switch err {
	case nil:
		return "nothing"
	case io.EOF:
		return "EOF"
	}
	if e, ok := errors.AsType[*abort.Error](err); ok && status.Code(err) == codes.Canceled && e.Reason == abort.Preempted {
		return "abort"
	}
	if s := status.Convert(err); s.Code() == codes.Canceled && s.Message() == "context canceled" {
		return "canceled"
	}
	return err.Error()
}
