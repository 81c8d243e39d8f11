package e2e_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
)

// A call is one request, as the client, the ext_proc server, the backend and the
// observer know it. They find it by its path and query.
type call struct {
	marks
	path *path
	uri  string

	// The plan.
	header  http.Header
	body    io.Reader
	request abort.Request // as tracked; the ext_proc server fills in ID and Endpoint
	hold    mark          // the ext_proc server holds its reply to this message until resume is closed
	busy    mark          // the ext_proc server does not look after its reply to this message until look is closed
	resume  chan struct{} // also what the backend "resumes" waits for
	look    chan struct{}
	quitAt  mark                // at this message the ext_proc server does not reply
	quit    func(process) error // but this, and ends
	backend backend
	trailer bool // of the response
	enough  int  // how many bytes of the response the client reads before it sets hasEnough

	// What happened: each may be read when the mark is set.
	handle    *abort.Handle // tracked
	seen      []mark        // hungUp: what the ext_proc server got
	ended     error         // hungUp: what Recv or Send failed with
	served    error         // backendDone
	servedAt  time.Time     // backendDone
	text      string        // done: what the backend wrote, or was going to; "" before it knows
	reply     reply         // done
	doneAt    time.Time     // done
	event     extproc.Event // observed
	evictedAt time.Time     // world.evict has returned
	logged    line          // world.evictIn has returned
}

// A backend serves a call. It returns an error if the client has left.
type backend func(c *call, w http.ResponseWriter, r *http.Request) error

// A reply is what a client got.
type reply struct {
	status          int
	header, trailer http.Header
	length          int64
	close           bool // HTTP/1.1: the connection ends with it
	body            string
	err             error // why it is not complete
}

var calls atomic.Int64

// newCall returns a call that is not started.
func newCall(p *path, b backend) *call {
	return &call{
		path:    p,
		uri:     fmt.Sprintf("/call/%d", calls.Add(1)),
		header:  http.Header{"Content-Type": {"application/json"}},
		body:    strings.NewReader(`{"model":"m"}`),
		resume:  make(chan struct{}),
		look:    make(chan struct{}),
		backend: b,
	}
}

// do is the client. It leaves when ctx is done.
func (c *call) do(ctx context.Context) {
	c.reply = c.exchange(ctx)
	c.doneAt = time.Now()
	c.set(done)
}

func (c *call) exchange(ctx context.Context) (r reply) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.path.url+c.uri, c.body)
	if err != nil {
		return reply{err: err}
	}
	req.Header = c.header
	resp, err := c.path.client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	var body strings.Builder
	buf := make([]byte, 32<<10)
	for err == nil {
		var n int
		n, err = resp.Body.Read(buf)
		body.Write(buf[:n])
		if c.enough > 0 && body.Len() >= c.enough {
			c.set(hasEnough)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return reply{resp.StatusCode, resp.Header, resp.Trailer, resp.ContentLength, resp.Close, body.String(), err}
}

// serve is the backend.
func (c *call) serve(w http.ResponseWriter, r *http.Request) {
	c.set(called)
	c.served = c.backend(c, w, r)
	c.servedAt = time.Now()
	c.set(backendDone)
	if c.served != nil {
		panic(http.ErrAbortHandler)
	}
}

// must waits until all marks are set.
func (c *call) must(t testing.TB, all ...mark) {
	t.Helper()
	if err := c.await(all...); err != nil {
		t.Fatalf("%s %s: %v", c.path.name, c.uri, err)
	}
}

// A mark is something that happens to a call.
type mark string

const (
	tracked     mark = "the ext_proc server tracks it"
	holding     mark = "the ext_proc server holds its reply"
	isBusy      mark = "the ext_proc server is busy"
	hungUp      mark = "the ext_proc server's loop ends"
	called      mark = "the backend is called"
	uploaded    mark = "the backend has a part of the request"
	wrote       mark = "the backend has written"
	backendDone mark = "the backend is done"
	passed      mark = "the proxy has all of the response" // set by the fake
	hasEnough   mark = "the client has read enough"
	done        mark = "the client is done"
	observed    mark = "the observer is told"

	// The ext_proc server has got one of these. What ends the request is requestEnd, too,
	// and what ends the response responseEnd.
	requestHeaders   mark = "request headers"
	requestBody      mark = "request body"
	requestTrailers  mark = "request trailers"
	requestEnd       mark = "request end"
	responseHeaders  mark = "response headers"
	responseBody     mark = "response body"
	responseTrailers mark = "response trailers"
	responseEnd      mark = "response end"
)

// replied marks that the ext_proc server has sent its reply to a message.
func replied(to mark) mark { return "reply to " + to }

// marks are what has happened to a call.
type marks struct {
	mu sync.Mutex // guards m
	m  map[mark]chan struct{}
}

// at returns the channel that is closed when m is set.
func (ms *marks) at(m mark) <-chan struct{} {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	return ms.atLocked(m)
}

func (ms *marks) atLocked(m mark) chan struct{} {
	if ms.m == nil {
		ms.m = make(map[mark]chan struct{})
	}
	if ms.m[m] == nil {
		ms.m[m] = make(chan struct{})
	}
	return ms.m[m]
}

// set sets m; again does nothing.
func (ms *marks) set(m mark) {
	ms.mu.Lock()
	defer ms.mu.Unlock()
	if c := ms.atLocked(m); !closed(c) {
		close(c)
	}
}

func (ms *marks) isSet(m mark) bool { return closed(ms.at(m)) }

// await waits until all are set. It fails when patience is over.
func (ms *marks) await(all ...mark) error {
	for _, m := range all {
		if err := await(ms.at(m), string(m)); err != nil {
			return err
		}
	}
	return nil
}

func await(c <-chan struct{}, what string) error {
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-c:
		return nil
	case <-t.C:
		return fmt.Errorf("in vain: %s", what)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// event is one of a response's.
func event(i int) string { return fmt.Sprintf("data: token %d\n\n", i) }

const last = "data: [DONE]\n\n"

// events are the first n.
func events(n int) (s string) {
	for i := range n {
		s += event(i)
	}
	return s
}

// The backends' usual ways.

// waits never answers.
func waits(c *call, _ http.ResponseWriter, r *http.Request) error {
	if _, err := io.Copy(io.Discard, &uploading{r.Body, c}); err != nil {
		return err
	}
	c.set(wrote)
	<-r.Context().Done()
	return context.Cause(r.Context())
}

// uploading marks that a part of the body is there.
type uploading struct {
	io.Reader
	c *call
}

func (u *uploading) Read(p []byte) (int, error) {
	n, err := u.Reader.Read(p)
	if n > 0 {
		u.c.set(uploaded)
	}
	return n, err
}

// begins answers with three events and no end.
func begins(c *call, w http.ResponseWriter, r *http.Request) error {
	if err := stream(w, r, event(0), event(1), event(2)); err != nil {
		return err
	}
	c.set(wrote)
	<-r.Context().Done()
	return context.Cause(r.Context())
}

// finishes answers with three events and an end, and a trailer if the call has one.
func finishes(c *call, w http.ResponseWriter, r *http.Request) error {
	if c.trailer {
		w.Header().Set("Trailer", "X-End")
		defer w.Header().Set("X-End", "yes")
	}
	return stream(w, r, event(0), event(1), event(2), last)
}

// resumes is finishes with an end that comes when the call is resumed.
func resumes(c *call, w http.ResponseWriter, r *http.Request) error {
	if c.trailer {
		w.Header().Set("Trailer", "X-End")
		defer w.Header().Set("X-End", "yes")
	}
	if err := stream(w, r, event(0), event(1), event(2)); err != nil {
		return err
	}
	c.set(wrote)
	select {
	case <-c.resume:
	case <-r.Context().Done():
		return context.Cause(r.Context())
	}
	_, err := io.WriteString(w, last)
	return err
}

// comesLate is finishes when the call is resumed.
func comesLate(c *call, w http.ResponseWriter, r *http.Request) error {
	if _, err := io.Copy(io.Discard, &uploading{r.Body, c}); err != nil {
		return err
	}
	c.set(wrote)
	select {
	case <-c.resume:
	case <-r.Context().Done():
		return context.Cause(r.Context())
	}
	return finishes(c, w, r)
}

// stream reads the request and writes a response's parts, each in a chunk of its own.
func stream(w http.ResponseWriter, r *http.Request, parts ...string) error {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return err
	}
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "text/event-stream")
	}
	for _, p := range parts {
		if err := write(w, p); err != nil {
			return err
		}
	}
	return nil
}

// write writes one chunk.
func write(w http.ResponseWriter, p string) error {
	if _, err := io.WriteString(w, p); err != nil {
		return err
	}
	return http.NewResponseController(w).Flush()
}
