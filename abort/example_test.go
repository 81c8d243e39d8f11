package abort_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"

	"github.com/extevict/extevict/abort"
)

// Whoever serves a request is its Owner; whoever has its context may end it.
func ExampleNew() {
	own, ctx := abort.New(context.Background())
	defer own.Close()

	// Somebody else, later:
	won := abort.FromContext(ctx).Abort(abort.Preempted)
	fmt.Println("aborted:", won)

	// The server sees its context end, and may ask why.
	<-ctx.Done()
	if e, ok := errors.AsType[*abort.Error](context.Cause(ctx)); ok {
		fmt.Println("reason:", e.Reason)
	}
	// Output:
	// aborted: true
	// reason: preempted
}

// A request has one outcome: who comes second learns that it was not theirs.
func ExampleHandle_Abort() {
	own, _ := abort.New(context.Background())
	defer own.Close()

	own.Settle(abort.Completed) // the last byte of the response is here
	fmt.Println(own.Handle().Abort(abort.Overloaded), own.Handle().Outcome())
	// Output: false completed
}

// A request that has not released anything to its client can be ended with a clean
// error and tried again; one that streams would be cut.
func ExampleHandle_AbortBefore() {
	own, _ := abort.New(context.Background())
	defer own.Close()

	own.Advance(abort.Streaming) // response headers go to the client
	fmt.Println(own.Handle().AbortBefore(abort.Streaming, abort.Preempted))
	// Output: false
}

// An index of requests forgets each of them when it ends.
func ExampleHandle_OnSettle() {
	own, _ := abort.New(context.Background())
	defer own.Close()

	inFlight := map[*abort.Handle]bool{own.Handle(): true}
	own.Handle().OnSettle(func(oc abort.Outcome) {
		delete(inFlight, own.Handle())
		fmt.Println(oc, len(inFlight))
	})
	own.Handle().Abort(abort.Draining)
	// Output: aborted 0
}

// An admin API aborts requests by the id that came with them.
func ExampleRegistry() {
	var reg abort.Registry
	for range 2 { // two requests, one id: it is the clients' choice
		own, _ := abort.New(context.Background())
		defer own.Close()
		reg.Add("chat-7", own.Handle())
	}
	fmt.Println(reg.Abort("chat-7", abort.Canceled), "aborted,", reg.Len(), "left")
	// Output: 2 aborted, 0 left
}

// A reverse proxy of net/http can be the Owner of its requests: then they are aborted
// like those behind Envoy. The client gets a 429 if nothing was released to it yet, else
// its connection is cut.
func Example_reverseProxy() {
	working, freed := make(chan bool), make(chan bool)
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		working <- true
		<-r.Context().Done() // the abort has closed the connection
		freed <- true
	}))
	defer engine.Close()
	upstream, _ := url.Parse(engine.URL)

	var reg abort.Registry
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		own, ctx := abort.New(r.Context())
		defer own.Close()
		reg.Add(r.Header.Get("X-Request-Id"), own.Handle())
		p := httputil.ReverseProxy{
			Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(upstream) },
			ModifyResponse: func(*http.Response) error {
				if !own.Advance(abort.Streaming) {
					return own.Handle().Err() // the abort came before the first byte
				}
				return nil
			},
			ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
				if e, ok := errors.AsType[*abort.Error](context.Cause(ctx)); ok {
					http.Error(w, "evicted: "+e.Reason.String(), http.StatusTooManyRequests)
					return
				}
				http.Error(w, "bad gateway", http.StatusBadGateway)
			},
		}
		p.ServeHTTP(w, r.WithContext(ctx)) // panics if the client's connection is to be cut
		own.Settle(abort.Completed)
	}))
	defer proxy.Close()

	go func() {
		<-working
		fmt.Println("aborted:", reg.Abort("chat-7", abort.Preempted))
	}()
	req, _ := http.NewRequest("GET", proxy.URL, nil)
	req.Header.Set("X-Request-Id", "chat-7")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	resp.Body.Close()
	fmt.Println("client:", resp.StatusCode)
	<-freed
	fmt.Println("engine: free")
	// Output:
	// aborted: 1
	// client: 429
	// engine: free
}

// Who is in flight, by the ids that came with them.
func ExampleRegistry_All() {
	var reg abort.Registry
	own, _ := abort.New(context.Background())
	reg.Add("chat-7", own.Handle())
	for id, h := range reg.All() {
		fmt.Println(id, h.Outcome(), h.Progress().Phase)
	}
	own.Close() // it is forgotten
	fmt.Println(reg.Len())
	// Output:
	// chat-7 pending waiting
	// 0
}

// A reason that somebody typed becomes a label.
func ExampleReason_String() {
	fmt.Println(abort.Reason("Out of KV cache!"))
	// Output: out-of-kv-cache-
}

// What a server finds in its request's context: the handle, and after an abort the reason.
func ExampleFromContext() {
	fmt.Println(abort.FromContext(context.Background()).Abort("quota")) // no request: a nil Handle is safe

	own, ctx := abort.New(context.Background())
	defer own.Close()
	h := abort.FromContext(ctx)
	h.Describe(abort.Request{ID: "chat-7", Priority: -1})
	h.Abort(abort.Draining)
	fmt.Println(h.Requests()[0].ID, h.Err(), context.Cause(ctx) == h.Err())
	// Output:
	// false
	// chat-7 abort: request aborted: draining true
}

// An Aborter of one function: it writes an audit record before a request is ended.
func ExampleAborterFunc() {
	audit := abort.AborterFunc(func(_ context.Context, h *abort.Handle, r abort.Reason) error {
		fmt.Println("ends", h.Requests()[0].ID, "because of", r)
		return nil // an error would spare it
	})
	own, ctx := abort.New(context.Background())
	defer own.Close()
	own.Handle().Describe(abort.Request{ID: "chat-7"})
	audit.Abort(ctx, own.Handle(), abort.Preempted)
	// Output: ends chat-7 because of preempted
}
